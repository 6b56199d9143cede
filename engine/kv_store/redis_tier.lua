-- The shared tier in Redis: what is stored, who holds it, what is being written. Each call is one change, all or nothing.
-- KEYS[1]: prefix of all keys (with a hash tag). ARGV: operation, unix seconds ('' for Redis' clock), JSON of arguments.

local P = KEYS[1]
local now = tonumber(ARGV[2])
if not now then
    local time = redis.call('TIME')
    now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local given = cjson.decode(ARGV[3])

local function segment(key)
    local text = redis.call('HGET', P .. 'segments', key)
    return text and cjson.decode(text)
end

local function all(hash)
    local found, flat = {}, redis.call('HGETALL', P .. hash)
    for i = 1, #flat, 2 do found[flat[i]] = cjson.decode(flat[i + 1]) end
    return found
end

local function save(key, value) redis.call('HSET', P .. 'segments', key, cjson.encode(value)) end

local function drop_parts(copy, parts)
    redis.call('UNLINK', P .. 'head:' .. copy)
    for i = 0, parts - 1 do redis.call('UNLINK', P .. 'part:' .. copy .. ':' .. i) end
end

local function remove(key, value)
    drop_parts(value.copy, value.parts)
    redis.call('HDEL', P .. 'segments', key)
    return value.size
end

-- pinned, expired
local function kept(key, value)
    local holders = redis.call('SMEMBERS', P .. 'held:' .. key)
    local expired = #holders > 0
    for _, name in ipairs(holders) do
        local text = redis.call('HGET', P .. 'holders', name)
        if text then
            local policy = cjson.decode(text)
            if policy.pinned then return true, false end
            if policy.ttl == cjson.null or math.max(policy.set_at, value.used) + policy.ttl > now then
                expired = false
            end
        end
    end
    return false, expired
end

local function stored(key)
    local value = segment(key)
    if value then
        local _, expired = kept(key, value)
        if expired then return nil, value end
    end
    return value, nil
end

local function drop_lapsed_writers()
    local freed = 0
    for id, writer in pairs(all('writing')) do
        if writer.expires < now then
            for _, copy in ipairs(writer.copies) do drop_parts(copy.copy, copy.parts) end
            redis.call('HDEL', P .. 'writing', id)
            freed = freed + writer.size
        end
    end
    return freed
end

local function total()
    local bytes = 0
    for _, value in pairs(all('segments')) do bytes = bytes + value.size end
    for _, writer in pairs(all('writing')) do bytes = bytes + writer.size end
    return bytes
end

local function set_policy()
    local policy = { ttl = given.ttl, pinned = given.pinned, set_at = now }
    redis.call('HSET', P .. 'holders', given.holder, cjson.encode(policy))
end

local operations = {}

function operations.match()
    for count, key in ipairs(given.keys) do
        if not stored(key) then return count - 1 end
    end
    return #given.keys
end

-- The stored segments as JSON, marked as used; or the index of the first that is missing.
function operations.open()
    local found = {}
    for i, key in ipairs(given.keys) do
        local value = stored(key)
        if not value then return i - 1 end
        found[i] = value
    end
    for i, key in ipairs(given.keys) do
        found[i].used = now
        save(key, found[i])
    end
    return cjson.encode(found)
end

-- {1}, or {0, bytes that could be had}. What must go is removed, least needed first.
function operations.reserve()
    drop_lapsed_writers()
    local room = given.cap - total()
    local spare, candidates = {}, {}
    for _, key in ipairs(given.spare) do spare[key] = true end
    if given.size > room then
        for key, value in pairs(all('segments')) do
            local pinned, expired = kept(key, value)
            if not pinned and not spare[key] then
                table.insert(candidates, { key = key, value = value, expired = expired })
            end
        end
        table.sort(candidates, function(a, b)
            if a.expired ~= b.expired then return a.expired end
            if a.value.used ~= b.value.used then return a.value.used < b.value.used end
            return a.value.start > b.value.start
        end)
    end
    local victims = {}
    for _, candidate in ipairs(candidates) do
        if given.size <= room then break end
        room = room + candidate.value.size
        table.insert(victims, candidate)
    end
    if given.size > room then return { 0, math.max(room, 0) } end
    for _, victim in ipairs(victims) do remove(victim.key, victim.value) end
    local writer = { size = given.size, copies = given.copies, expires = now + given.life }
    redis.call('HSET', P .. 'writing', given.writer, cjson.encode(writer))
    return { 1, #victims }
end

-- How many of the writer's segments were stored by another meanwhile; -1 where its room was given to others.
function operations.commit()
    if redis.call('HDEL', P .. 'writing', given.writer) == 0 then return -1 end
    local duplicates = 0
    for _, copy in ipairs(given.copies) do
        local old, expired = stored(copy.key)
        if expired then remove(copy.key, expired) end
        if old then
            drop_parts(copy.copy, copy.parts)
            old.used = now
            save(copy.key, old)
            duplicates = duplicates + 1
        else
            redis.call('PERSIST', P .. 'head:' .. copy.copy)
            for i = 0, copy.parts - 1 do redis.call('PERSIST', P .. 'part:' .. copy.copy .. ':' .. i) end
            save(copy.key, { copy = copy.copy, parts = copy.parts, size = copy.size, start = copy.start, used = now })
        end
    end
    return duplicates
end

-- Without effect on a writer that has committed, whose answer was lost.
function operations.abort()
    if redis.call('HDEL', P .. 'writing', given.writer) == 1 then
        for _, copy in ipairs(given.copies) do drop_parts(copy.copy, copy.parts) end
    end
    return 0
end

function operations.attach()
    set_policy()
    for _, key in ipairs(given.keys) do
        redis.call('SADD', P .. 'holds:' .. given.holder, key)
        redis.call('SADD', P .. 'held:' .. key, given.holder)
        local value = segment(key)
        if value then
            value.used = now
            save(key, value)
        end
    end
    return 0
end

function operations.set_policy()
    set_policy()
    return 0
end

function operations.holders()
    local found = {}
    for _, key in ipairs(given.keys) do
        for _, name in ipairs(redis.call('SMEMBERS', P .. 'held:' .. key)) do
            local text = redis.call('HGET', P .. 'holders', name)
            if text then found[name] = cjson.decode(text) end
        end
    end
    return cjson.encode(found)
end

-- Bytes freed.
function operations.release()
    local freed = 0
    for _, key in ipairs(redis.call('SMEMBERS', P .. 'holds:' .. given.holder)) do
        redis.call('SREM', P .. 'held:' .. key, given.holder)
        local value = redis.call('SCARD', P .. 'held:' .. key) == 0 and segment(key)
        if value then freed = freed + remove(key, value) end
    end
    redis.call('DEL', P .. 'holds:' .. given.holder)
    redis.call('HDEL', P .. 'holders', given.holder)
    return freed
end

-- A damaged copy goes, if it is still the one.
function operations.condemn()
    local value = segment(given.key)
    if value and value.copy == given.copy then return remove(given.key, value) end
    return 0
end

function operations.sweep()
    local freed = drop_lapsed_writers()
    for key, value in pairs(all('segments')) do
        local _, expired = kept(key, value)
        if expired then freed = freed + remove(key, value) end
    end
    return freed
end

function operations.total() return total() end

return operations[ARGV[1]]()
