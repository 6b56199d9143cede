-- Jobs whose lease has ended go back into their line, or to the dead letters; what only a dead API process was reading
-- is cancelled. Returns how many leases had ended.
local expired = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', '(' .. stamp(now), 'LIMIT', 0, 100)
for _, id in ipairs(expired) do
  local row = redis.call('HMGET', key('job', id), 'attempts', 'max_attempts', 'error')
  local attempts = tonumber(row[1])
  if attempts < tonumber(row[2]) then
    requeue(id, nil, attempts, nil)
  else
    local reason = string.format('its worker died or fell silent in each of %d attempts', attempts)
    local earlier = decoded(row[3])
    if earlier and earlier.message then
      reason = reason .. '; an earlier one ended with: ' .. earlier.message
    end
    finish(id, 'dead', nil, cjson.encode({code = 'worker_lost', message = reason}))
  end
end
for _, reader in ipairs(redis.call('ZRANGEBYSCORE', key('readers'), '-inf', '(' .. stamp(now))) do
  for _, id in ipairs(redis.call('SMEMBERS', key('read_by', reader))) do
    redis.call('SREM', key('readers_of', id), reader)
    if redis.call('EXISTS', key('readers_of', id)) == 0 and is_unfinished(id) then
      cancel(id, '{"code":"abandoned","message":"the server that this was read from is gone"}')
    end
  end
  redis.call('DEL', key('read_by', reader))
  redis.call('ZREM', key('readers'), reader)
end
return #expired
