-- nonce, job, epoch, events, fields to set
local gone = lost(ARGV[3], ARGV[4])
if gone then
  return gone
end
if job_field(ARGV[3], 'emitted') == ARGV[2] then
  return {'ok'}
end
redis.call('HSET', key('job', ARGV[3]), 'emitted', ARGV[2])
for name, value in pairs(cjson.decode(ARGV[6])) do
  redis.call('HSET', key('job', ARGV[3]), name, value)
end
append(ARGV[3], cjson.decode(ARGV[5]))
return {'ok'}
