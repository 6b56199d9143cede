-- What living workers say of themselves, and what they have in common.
local found = {}
for _, name in ipairs(redis.call('ZREVRANGEBYSCORE', key('worker_seen'), '+inf', stamp(now - SEEN_S))) do
  found[#found + 1] = redis.call('HGET', key('workers'), name)
end
return {redis.call('GET', key('fleet')) or '', found}
