-- job, epoch, lease in seconds
local gone = lost(ARGV[2], ARGV[3])
if gone then
  return gone
end
redis.call('ZADD', key('leases'), stamp(now + tonumber(ARGV[4])), ARGV[2])
local row = redis.call('HMGET', key('job', ARGV[2]), 'kind', 'worker', 'entry')
if redis.call('EXISTS', key('queue', row[1])) == 1 then  -- the entry's idle time tells of a worker's silence
  redis.call('XCLAIM', key('queue', row[1]), GROUP, row[2], 0, row[3], 'JUSTID')
end
return {'ok'}
