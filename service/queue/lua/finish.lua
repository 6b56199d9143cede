-- nonce, job, epoch, result, effects, bytes of KV that the worker's site holds by holder
if remembered(ARGV[2]) then
  return {'ok'}
end
local gone = lost(ARGV[3], ARGV[4])
if gone then
  return gone
end
local site = job_field(ARGV[3], 'site')
local effects = cjson.decode(ARGV[6])
if any_busy(effects) then
  return {'busy'}
end
finish(ARGV[3], 'succeeded', ARGV[5], nil)
apply(effects)
for holder, tiers in pairs(cjson.decode(ARGV[7])) do
  redis.call('HSET', key('kv_at', holder), site, tiers)
  redis.call('SADD', key('kv_of', site), holder)
end
remember(ARGV[2], 'ok')
return {'ok'}
