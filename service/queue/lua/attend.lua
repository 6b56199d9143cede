-- reader, seconds
redis.call('ZADD', key('readers'), stamp(now + tonumber(ARGV[3])), ARGV[2])
return 1
