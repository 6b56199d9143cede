-- what to do, piece, site. A piece is kind:name; its list is the site's own where it is about KV.
local REMOVING_MS = 60000
local kind, name = string.match(ARGV[3], '^(%a+):(.*)$')
local is_kv = kind == 'holder' or kind == 'policy'
local list = is_kv and key('garbage_at', ARGV[4]) or key('garbage')
local removing = key('removing', kind, name)

local function is_named()
  if kind == 'policy' then  -- nothing to do where its holder is gone
    return redis.call('EXISTS', record_key('prefills', name)) == 0
  elseif kind == 'upload' then
    return redis.call('EXISTS', record_key('files', name)) == 1
  elseif kind == 'folder' then
    return redis.call('HEXISTS', key('folders'), name) == 1
  end
  return redis.call('EXISTS', record_key('prefills', name)) == 1 or redis.call('EXISTS', key('shared', name)) == 1
end

if ARGV[2] == 'begin' then
  if is_named() then
    redis.call('ZREM', list, ARGV[3])
    return {'named'}
  end
  if not redis.call('ZSCORE', list, ARGV[3]) then
    return {'gone'}
  end
  if not redis.call('SET', removing, '1', 'NX', 'PX', REMOVING_MS) then
    return {'busy'}
  end
elseif ARGV[2] == 'done' then
  redis.call('ZREM', list, ARGV[3])
  redis.call('DEL', removing)
elseif ARGV[2] == 'later' then
  redis.call('DEL', removing)
elseif not is_named() then  -- abandon
  redis.call('ZADD', list, redis.call('INCR', key('garbage_count')), ARGV[3])
end
return {'ok'}
