-- In front of every script. KEYS[1] is the name space, a hash tag, so that all keys are in one slot of a cluster.
-- ARGV[1] is the time in unix seconds; empty: Redis' own clock, which no other machine's clock can disturb.
local P = KEYS[1]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local REPLY_KEPT_MS = 120000

local function key(...)
  return P .. table.concat({...}, ':')
end

-- Lua's own conversion would keep 14 digits, too few for microseconds.
local function stamp(seconds)
  return string.format('%.6f', seconds)
end

-- Fields of records are JSON. nil for null and for what isn't there.
local function decoded(field)
  if not field or field == 'null' then
    return nil
  end
  return cjson.decode(field)
end

local function encoded(value)
  if value == nil then
    return 'null'
  end
  return cjson.encode(value)
end

-- A command that is sent again because its reply was lost finds what it has done already.
local function remembered(nonce)
  return redis.call('GET', key('reply', nonce))
end

local function remember(nonce, reply)
  redis.call('SET', key('reply', nonce), reply, 'PX', REPLY_KEPT_MS)
end
