-- nonce, job, epoch, error, whether to try again, seconds to rest before that, effects
if remembered(ARGV[2]) then
  return {'ok'}
end
local id, failure = ARGV[3], ARGV[5]
local gone = lost(id, ARGV[4])
if gone then
  return gone
end
local effects = cjson.decode(ARGV[8])
if any_busy(effects) then
  return {'busy'}
end
local row = redis.call('HMGET', key('job', id), 'attempts', 'max_attempts')
local retry = ARGV[6] == '1'
if retry and tonumber(row[1]) < tonumber(row[2]) then
  requeue(id, failure, tonumber(row[1]), now + tonumber(ARGV[7]))
else
  finish(id, retry and 'dead' or 'failed', nil, failure)
  apply(effects)
end
remember(ARGV[2], 'ok')
return {'ok'}
