-- Forget what ended before a time: one step, at most so many jobs. Returns how many.
local before, most, forgotten = '(' .. stamp(tonumber(ARGV[2])), tonumber(ARGV[3]), 0
for _, state in ipairs({'succeeded', 'failed', 'cancelled', 'dead'}) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('ended', state), '-inf', before, 'LIMIT', 0, most)) do
    local documents = decoded(job_field(id, 'documents'))
    for _, document_id in ipairs(documents or {}) do
      redis.call('SREM', key('about', document_id), id)
    end
    redis.call('DEL', key('job', id), key('events', id))
    redis.call('ZREM', key('ended', state), id)
    count(state, -1)
    forgotten = forgotten + 1
  end
end
return forgotten
