-- Jobs: a hash each, and where they stand. Waiting ones are in one line a (kind, tenant), in the order of their aged
-- priority; running ones in `leases`, by the end of their lease. Each waiting job has put an entry into its kind's
-- stream, and whoever is given a job has one delivered: so what the group has pending is what runs (and who runs it),
-- and its lag is what waits. Which job comes with an entry is for fairness to say, not for the stream.
local AGEING_S = 30      -- so long a wait is worth one step of priority
local QUANTUM = 1024     -- service.queue.fairness
local LOOK_AHEAD = 16    -- jobs of a line that are looked at for one that this worker may have
local AFFINITY_S = 2     -- so long a job waits for the worker that holds its KV
local SEEN_S = 10        -- service.presence
local FORGOTTEN_S = 3600 -- a worker that was last seen so long ago
local SITE_KEPT_S = 30 * 86400
local EVENTS_KEPT_S = 86400
local NEWS_KEPT = 4096
local GROUP = 'workers'
local NOBODY = 'nobody'  -- takes the entries of jobs that were cancelled while they waited
local SCRUBBED = '{"scrubbed":true}'
local CANCELLED = '{"code":"cancelled","message":"the job was cancelled"}'

local function job_field(id, name)
  return redis.call('HGET', key('job', id), name)
end

local function append(id, events)
  local last = redis.call('HINCRBY', key('job', id), 'last_seq', #events)
  for number, event in ipairs(events) do
    local seq = string.format('%d-0', last - #events + number)
    redis.call('XADD', key('events', id), seq, 't', event[1], 'd', event[2])
  end
  local count = redis.call('INCR', key('news_count'))
  redis.call('XADD', key('news'), 'MAXLEN', '~', NEWS_KEPT, string.format('%d-0', count), 'j', id)
end

local function append_state(id, state, attempt)
  append(id, {{'state', string.format('{"state":"%s","attempt":%d}', state, attempt)}})
end

local function count(state, by)
  redis.call('HINCRBY', key('counts'), state, by)
end

local function lane_of(id)
  local row = redis.call('HMGET', key('job', id), 'kind', 'tenant')
  return row[1], row[2], row[1] .. ':' .. row[2]
end

-- --- entries of the streams

local function offer(kind)
  local stream = key('queue', kind)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
  redis.call('XADD', stream, '*', 'waiting', '1')
end

-- An entry; a new one where somebody has cleared the stream.
local function deliver(kind, consumer)
  local stream = key('queue', kind)
  local got = redis.call('EXISTS', stream) == 1
    and redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
  if not got then
    offer(kind)
    got = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
  end
  return got[1][2][1][1]
end

-- What is done is trimmed from the front and never deleted by its id: behind a deleted entry Redis can't tell the lag.
local function settle(kind, entry)
  local stream = key('queue', kind)
  if redis.call('EXISTS', stream) == 0 then
    return
  end
  redis.call('XACK', stream, GROUP, entry)
  local oldest = redis.call('XPENDING', stream, GROUP)[2]
  if not oldest then
    local info = redis.call('XINFO', 'GROUPS', stream)[1]
    for number = 1, #info, 2 do
      if info[number] == 'last-delivered-id' then
        local time, seq = string.match(info[number + 1], '(%d+)-(%d+)')
        oldest = time .. '-' .. string.format('%d', seq + 1)
      end
    end
  end
  redis.call('XTRIM', stream, 'MINID', oldest)
end

-- --- waiting

local function enqueue(id, not_before)
  local kind, tenant, lane = lane_of(id)
  local row = redis.call('HMGET', key('job', id), 'created_at', 'priority', 'cost_tokens')
  redis.call('HSET', key('job', id), 'state', 'queued', 'since', stamp(now))
  redis.call('ZADD', key('queued', lane), row[1], id)
  redis.call('ZADD', key('costs', lane), row[3], id)
  redis.call('ZADD', key('tenants', kind), 0, tenant)
  if not_before and not_before > now then
    redis.call('ZADD', key('resting'), stamp(not_before), id)
  else
    redis.call('ZADD', key('line', lane), stamp(tonumber(row[1]) - AGEING_S * tonumber(row[2])), id)
  end
  count('queued', 1)
  offer(kind)
end

local function leave_line(id)
  local kind, tenant, lane = lane_of(id)
  redis.call('ZREM', key('queued', lane), id)
  redis.call('ZREM', key('costs', lane), id)
  redis.call('ZREM', key('line', lane), id)
  redis.call('ZREM', key('resting'), id)
  if redis.call('EXISTS', key('queued', lane)) == 0 then
    redis.call('ZREM', key('tenants', kind), tenant)
  end
  count('queued', -1)
  return kind
end

local function wake_rested()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('resting'), '-inf', stamp(now), 'LIMIT', 0, 100)) do
    local _, _, lane = lane_of(id)
    local row = redis.call('HMGET', key('job', id), 'created_at', 'priority')
    redis.call('ZREM', key('resting'), id)
    redis.call('ZADD', key('line', lane), stamp(tonumber(row[1]) - AGEING_S * tonumber(row[2])), id)
  end
end

-- Whether a living worker elsewhere holds the KV that this job needs, and may still be waited for.
local function is_kept_for_another(id, site)
  local row = redis.call('HMGET', key('job', id), 'affinity', 'since')
  if not row[1] or now - tonumber(row[2]) >= AFFINITY_S then
    return false
  end
  local alive = false
  for _, holder in ipairs(redis.call('HKEYS', key('kv_at', row[1]))) do
    if holder == site then
      return false
    end
    local seen = redis.call('ZSCORE', key('sites'), holder)
    alive = alive or (seen and now - tonumber(seen) < SEEN_S)
  end
  return alive
end

-- The first of a line that a worker at `site` may have, and its place in the line.
local function head(lane, site)
  local row = redis.call('ZRANGE', key('line', lane), 0, LOOK_AHEAD - 1, 'WITHSCORES')
  for number = 1, #row, 2 do
    if not is_kept_for_another(row[number], site) then
      return row[number], tonumber(row[number + 1])
    end
  end
end

-- The same among the cheapest of a line, of those that cost less than `below`.
local function short_head(lane, site, below)
  local first, first_place
  local ids = redis.call('ZRANGEBYSCORE', key('costs', lane), '-inf', '(' .. below, 'LIMIT', 0, LOOK_AHEAD)
  for _, id in ipairs(ids) do
    local place = tonumber(redis.call('ZSCORE', key('line', lane), id))  -- none while it rests
    if place and (not first or place < first_place) and not is_kept_for_another(id, site) then
      first, first_place = id, place
    end
  end
  return first, first_place
end

-- The first job of each tenant (but those in `without`) among these kinds (that costs less than `below`): tenant, id,
-- cost; by tenant.
local function heads(kinds, site, below, without)
  local best, names = {}, {}
  for _, kind in ipairs(kinds) do
    for _, tenant in ipairs(redis.call('ZRANGE', key('tenants', kind), 0, -1)) do
      local lane, id, place = kind .. ':' .. tenant, nil, nil
      if not without[tenant] then
        if below then
          id, place = short_head(lane, site, below)
        else
          id, place = head(lane, site)
        end
      end
      if id then
        if not best[tenant] then
          names[#names + 1] = tenant
        end
        if not best[tenant] or place < best[tenant].place then
          best[tenant] = {tenant = tenant, id = id, place = place}
        end
      end
    end
  end
  table.sort(names)
  local found = {}
  for number, tenant in ipairs(names) do
    found[number] = best[tenant]
    found[number].cost = tonumber(job_field(best[tenant].id, 'cost_tokens'))
  end
  return found
end

-- service.queue.fairness.choose, with the same result. `waiting` is sorted by tenant.
local function choose(lane, waiting)
  local stored = redis.call('HGETALL', key('fair', lane))
  local current = redis.call('GET', key('fair_current', lane))
  local deficits, chosen = {}, nil
  for number = 1, #stored, 2 do
    deficits[stored[number]] = tonumber(stored[number + 1])
  end
  for _, one in ipairs(waiting) do
    one.need, one.credit = math.max(one.cost, QUANTUM), deficits[one.tenant] or 0
    if one.tenant == current and one.credit >= one.need then
      chosen = one
    end
  end
  if not chosen then
    local ring, rounds, position = {}, nil, nil
    for _, one in ipairs(waiting) do
      if not current or one.tenant > current then
        ring[#ring + 1] = one
      end
    end
    for number = 1, #waiting - #ring do
      ring[#ring + 1] = waiting[number]
    end
    for place, one in ipairs(ring) do
      local visits = math.max(1, math.ceil((one.need - one.credit) / QUANTUM))
      if not rounds or visits < rounds then
        rounds, position = visits, place
      end
    end
    for place, one in ipairs(ring) do
      one.credit = one.credit + QUANTUM * (place <= position and rounds or rounds - 1)
    end
    chosen = ring[position]
  end
  chosen.credit = chosen.credit - chosen.need
  redis.call('DEL', key('fair', lane))
  for _, one in ipairs(waiting) do
    redis.call('HSET', key('fair', lane), one.tenant, string.format('%d', one.credit))
  end
  redis.call('SET', key('fair_current', lane), chosen.tenant)
  return chosen.id
end

-- --- running

local function start(id, worker, lease_s, site)
  local k = key('job', id)
  local kind = leave_line(id)
  local _, _, lane = lane_of(id)
  local attempt = redis.call('HINCRBY', k, 'attempts', 1)
  redis.call('HINCRBY', k, 'epoch', 1)
  redis.call('HSET', k, 'state', 'running', 'worker', worker, 'site', site, 'entry', deliver(kind, worker))
  redis.call('HSETNX', k, 'started_at', stamp(now))
  redis.call('ZADD', key('leases'), stamp(now + lease_s), id)
  redis.call('HINCRBY', key('running'), lane, 1)
  count('running', 1)
  follow(id, 'running', nil)
  append_state(id, 'running', attempt)
end

-- What an attempt that doesn't hold the job (any more) is told; nil if it does.
local function lost(id, epoch)
  local row = redis.call('HMGET', key('job', id), 'state', 'epoch')
  if row[1] == 'running' and row[2] == epoch then
    return nil
  end
  return {'lost', row[1] or 'gone', row[2] or '0'}
end

local function stop_running(id)
  local k = key('job', id)
  local kind, _, lane = lane_of(id)
  settle(kind, job_field(id, 'entry'))
  redis.call('HDEL', k, 'worker', 'entry')
  redis.call('ZREM', key('leases'), id)
  if redis.call('HINCRBY', key('running'), lane, -1) == 0 then
    redis.call('HDEL', key('running'), lane)
  end
  count('running', -1)
end

-- A running job back into its line.
local function requeue(id, failure, attempts, not_before)
  local k = key('job', id)
  stop_running(id)
  redis.call('HINCRBY', k, 'epoch', 1)
  redis.call('HSET', k, 'attempts', attempts)
  if failure then
    redis.call('HSET', k, 'error', failure)
  end
  enqueue(id, not_before)
  follow(id, 'queued', nil)
  append_state(id, 'queued', attempts)
end

-- --- ends

-- Into a final state; the epoch is raised, so that whoever still runs it has lost it.
local function finish(id, state, result, failure)
  local k = key('job', id)
  if job_field(id, 'state') == 'running' then
    stop_running(id)
  else
    local kind = leave_line(id)
    settle(kind, deliver(kind, NOBODY))
  end
  redis.call('HINCRBY', k, 'epoch', 1)
  redis.call('HSET', k, 'state', state, 'finished_at', stamp(now))
  redis.call('HDEL', k, 'error')
  if result then
    redis.call('HSET', k, 'result', result)
  end
  if failure then
    redis.call('HSET', k, 'error', failure)
  end
  local row = redis.call('HMGET', k, 'single_flight', 'affinity', 'site')
  if row[1] then
    redis.call('DEL', key('flight', row[1]))
  end
  if state == 'succeeded' then
    redis.call('HSET', k, 'progress', '1.0')
    if row[2] and row[3] and row[3] ~= '' then
      redis.call('HSETNX', key('kv_at', row[2]), row[3], '{}')
      redis.call('SADD', key('kv_of', row[3]), row[2])
    end
  end
  for _, reader in ipairs(redis.call('SMEMBERS', key('readers_of', id))) do
    redis.call('SREM', key('read_by', reader), id)
  end
  redis.call('DEL', key('readers_of', id))
  count(state, 1)
  redis.call('ZADD', key('ended', state), stamp(now), id)
  follow(id, state, failure)
  append(id, {{'done', string.format('{"state":"%s","error":%s}', state, failure or 'null')}})
  redis.call('EXPIRE', key('events', id), EVENTS_KEPT_S)
end

local function is_unfinished(id)
  local state = job_field(id, 'state')
  return state == 'queued' or state == 'running'
end

local function cancel(id, failure)
  redis.call('HSET', key('job', id), 'cancel_requested', '1')
  finish(id, 'cancelled', nil, failure)
end

-- Forget what a job was asked and what it said.
local function scrub(id, failure)
  local k = key('job', id)
  if redis.call('EXISTS', k) == 0 then
    return
  end
  if is_unfinished(id) then
    cancel(id, failure)
  end
  redis.call('HSET', k, 'payload', SCRUBBED)
  if job_field(id, 'result') then
    redis.call('HSET', k, 'result', SCRUBBED)
  end
  local events = redis.call('XRANGE', key('events', id), '-', '+')
  redis.call('DEL', key('events', id))
  for _, event in ipairs(events) do
    local kind, data = event[2][2], event[2][4]
    if kind == 'token' then
      data = '{"text":""}'
    elseif kind == 'progress' then  -- its note names files of an archive
      local shown = cjson.decode(data)
      shown.note = nil
      data = cjson.encode(shown)
    end
    redis.call('XADD', key('events', id), event[1], 't', kind, 'd', data)
  end
  redis.call('EXPIRE', key('events', id), EVENTS_KEPT_S)
end

-- --- new jobs and effects

local function wanted_by(id, reader)
  if reader and is_unfinished(id) then
    redis.call('SADD', key('readers_of', id), reader)
    redis.call('SADD', key('read_by', reader), id)
  end
end

-- The id of the new job, or of the one that does this work already.
local function insert(job)
  local id, k = job.id, key('job', job.id)
  if redis.call('EXISTS', k) == 1 then
    return id
  end
  if job.single_flight then
    local rival = redis.call('GET', key('flight', job.single_flight))
    if rival then
      return rival
    end
    redis.call('SET', key('flight', job.single_flight), id)
    redis.call('HSET', k, 'single_flight', job.single_flight)
  end
  redis.call('HSET', k, 'id', id, 'kind', job.kind, 'tenant', job.tenant, 'payload', job.payload,
    'priority', job.priority, 'cost_tokens', job.cost_tokens, 'max_attempts', job.max_attempts,
    'attempts', 0, 'epoch', 0, 'created_at', stamp(now))
  if job.affinity then
    redis.call('HSET', k, 'affinity', job.affinity)
  end
  for _, document_id in ipairs(job.documents) do
    redis.call('SADD', key('about', document_id), id)
  end
  if #job.documents > 0 then
    redis.call('HSET', k, 'documents', cjson.encode(job.documents))
  end
  if job.kind == 'prefill' and job.single_flight
    and redis.call('EXISTS', record_key('prefills', job.single_flight)) == 1 then
    redis.call('HSET', k, 'prefill', job.single_flight)
    redis.call('HSET', record_key('prefills', job.single_flight), 'job_id', encoded(id))
  end
  enqueue(id, nil)
  wanted_by(id, job.reader)
  follow(id, 'queued', nil)
  append_state(id, 'queued', 0)
  return id
end

local function any_busy(effects)
  for _, change in ipairs(effects.changes) do
    if is_busy(change) then
      return true
    end
  end
  return false
end

-- Changes of records, then new jobs, then the statuses that follow from both. The id of the first job.
local function apply(effects)
  local due, first = {}, nil
  for _, change in ipairs(effects.changes) do
    local prefill_id = apply_change(change)
    if prefill_id then
      due[#due + 1] = prefill_id
    end
  end
  for _, job in ipairs(effects.put) do
    local id = insert(job)
    first = first or id
  end
  for _, prefill_id in ipairs(due) do
    derive(prefill_id)
  end
  return first
end
