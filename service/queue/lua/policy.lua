-- holder: how long and how firmly its KV is kept has changed, which each place that keeps KV must hear of.
for _, site in ipairs(redis.call('ZRANGE', key('sites'), 0, -1)) do
  redis.call('ZADD', key('garbage_at', site), redis.call('INCR', key('garbage_count')), 'policy:' .. ARGV[2])
end
return 1
