-- worker, site, what it says of itself: it lives.
redis.call('ZADD', key('worker_seen'), stamp(now), ARGV[2])
redis.call('HSET', key('workers'), ARGV[2], ARGV[4])
if ARGV[3] ~= '' then
  redis.call('ZADD', key('sites'), stamp(now), ARGV[3])
end
return 1
