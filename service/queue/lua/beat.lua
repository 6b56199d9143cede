-- worker, site, what it says of itself, what all workers must have in common: it lives. The fleet has what the first
-- of them has; while any of them lives, none that differs may join.
local fleet = redis.call('GET', key('fleet'))
if fleet and fleet ~= ARGV[5] then
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', key('worker_seen'), stamp(now - SEEN_S), '+inf')) do
    if other ~= ARGV[2] then
      return {'differs', fleet, other}
    end
  end
end
redis.call('SET', key('fleet'), ARGV[5])
redis.call('ZADD', key('worker_seen'), stamp(now), ARGV[2])
redis.call('HSET', key('workers'), ARGV[2], ARGV[4])
redis.call('ZADD', key('sites'), stamp(now), ARGV[3])
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', key('worker_seen'), '-inf', stamp(now - FORGOTTEN_S))) do
  redis.call('ZREM', key('worker_seen'), dead)
  redis.call('HDEL', key('workers'), dead)
end
for _, site in ipairs(redis.call('ZRANGEBYSCORE', key('sites'), '-inf', stamp(now - SITE_KEPT_S))) do
  for _, holder in ipairs(redis.call('SMEMBERS', key('kv_of', site))) do
    redis.call('HDEL', key('kv_at', holder), site)
  end
  redis.call('ZREM', key('sites'), site)
  redis.call('DEL', key('kv_of', site), key('garbage_at', site))
end
return {'ok'}
