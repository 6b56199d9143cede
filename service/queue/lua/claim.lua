-- nonce, worker, lease in seconds, site, kinds
local known = remembered(ARGV[2])
if known then
  return redis.call('HGETALL', key('job', known))
end
wake_rested()
local kinds = cjson.decode(ARGV[6])
local waiting = heads(kinds, ARGV[5])
if #waiting == 0 then
  return {}
end
local id = choose(table.concat(kinds, ','), waiting)
start(id, ARGV[3], tonumber(ARGV[4]), ARGV[5])
remember(ARGV[2], id)
return redis.call('HGETALL', key('job', id))
