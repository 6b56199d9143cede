-- change of a record, whether the record must be there
local change = cjson.decode(ARGV[2])
if ARGV[3] == '1' and redis.call('EXISTS', record_key(change.table, change.id)) == 0 then
  return {'unknown'}
end
if is_busy(change) then
  return {'busy'}
end
apply({changes = {change}, put = {}})
return {'ok'}
