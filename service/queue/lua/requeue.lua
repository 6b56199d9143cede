-- nonce, job
if remembered(ARGV[2]) then
  return {'ok'}
end
local id, k = ARGV[3], key('job', ARGV[3])
local state = job_field(id, 'state')
if not state then
  return {'unknown'}
end
if state ~= 'failed' and state ~= 'dead' then
  return {'refused', string.format("job %s is %s: 'failed' or 'dead' is expected", id, state)}
end
if job_field(id, 'payload') == SCRUBBED then
  return {'refused', string.format('job %s was forgotten: its document is deleted', id)}
end
local flight = job_field(id, 'single_flight')
local rival = flight and redis.call('GET', key('flight', flight))
if rival then
  return {'refused', string.format('job %s does the work of %s already', rival, id)}
end
if flight then
  redis.call('SET', key('flight', flight), id)
end
redis.call('ZREM', key('ended', state), id)
count(state, -1)
redis.call('HINCRBY', k, 'epoch', 1)
redis.call('HSET', k, 'attempts', 0, 'progress', '0')
redis.call('HDEL', k, 'error', 'finished_at')
redis.call('PERSIST', key('events', id))
enqueue(id, nil)
reopen_files(id)
follow(id, 'queued', nil)
append_state(id, 'queued', 0)
remember(ARGV[2], 'ok')
return {'ok'}
