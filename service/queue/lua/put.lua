-- nonce, job, effects
local known = remembered(ARGV[2])
if known then
  return {'ok', known}
end
local job, effects = cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
if redis.call('EXISTS', key('job', job.id)) == 1 then
  wanted_by(job.id, job.reader)
  return {'ok', job.id}
end
if any_busy(effects) then
  return {'busy'}
end
table.insert(effects.put, 1, job)
local id = apply(effects)
remember(ARGV[2], id)
return {'ok', id}
