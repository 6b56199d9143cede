-- nonce, tenant, file. The id of the document that went with its last handle.
local function discard(kind, name)
  local number = redis.call('INCR', key('garbage_count'))
  redis.call('ZADD', key('garbage'), number, kind .. ':' .. name)
end

-- Each place that keeps KV removes its own.
local function discard_holder(name)
  for _, site in ipairs(redis.call('ZRANGE', key('sites'), 0, -1)) do
    local number = redis.call('INCR', key('garbage_count'))
    redis.call('ZADD', key('garbage_at', site), number, 'holder:' .. name)
  end
  for _, site in ipairs(redis.call('HKEYS', key('kv_at', name))) do
    redis.call('SREM', key('kv_of', site), name)
  end
  redis.call('DEL', key('kv_at', name))
end

local function stop_prefill(prefill_id)
  local job_id = field('prefills', prefill_id, 'job_id')
  if job_id and is_unfinished(job_id) then
    cancel(job_id, CANCELLED)
  end
end

local function delete_document(id)
  local prefills = redis.call('SMEMBERS', key('prefills_of', id))
  table.sort(prefills)
  for _, prefill_id in ipairs(prefills) do
    stop_prefill(prefill_id)
  end
  discard('folder', field('documents', id, 'folder'))
  for _, prefill_id in ipairs(prefills) do
    discard_holder(prefill_id)
    redis.call('DEL', record_key('prefills', prefill_id))
  end
  for _, holder in ipairs(redis.call('SMEMBERS', key('shared_of', id))) do
    discard_holder(holder)
    for _, other in ipairs(redis.call('SMEMBERS', key('shared', holder))) do
      redis.call('SREM', key('shared_of', other), holder)
    end
    redis.call('DEL', key('shared', holder))
  end
  redis.call('HDEL', key('folders'), field('documents', id, 'folder'))
  redis.call('DEL', record_key('documents', id), key('prefills_of', id))
  local deleted = '{"code":"document_deleted","message":"the document was deleted while its answer was made"}'
  for _, job_id in ipairs(redis.call('SMEMBERS', key('about', id))) do
    scrub(job_id, deleted)
  end
  redis.call('DEL', key('about', id))
end

local known = remembered(ARGV[2])
if known then
  return {'ok', known}
end
local id, k = ARGV[4], record_key('files', ARGV[4])
local file = file_index(id)
if file.tenant ~= ARGV[3] then
  return {'unknown'}
end
local fidelity = field('files', id, 'fidelity')
redis.call('DEL', k)
reindex_file(id, file, {})
discard('upload', id)
if file.ingest_job then
  scrub(file.ingest_job, CANCELLED)
end
local gone = ''
if file.document_id then
  local others, wanted = redis.call('SMEMBERS', key('handles', file.document_id)), false
  for _, other in ipairs(others) do
    wanted = wanted or field('files', other, 'fidelity') == fidelity
  end
  if #others == 0 then
    local row = redis.call('HGETALL', record_key('documents', file.document_id))
    table.insert(row, 1, file.document_id)
    gone = cjson.encode(row)
    delete_document(file.document_id)
  elseif not wanted then
    stop_prefill(file.document_id .. ':' .. fidelity)
  end
end
remember(ARGV[2], gone)
return {'ok', gone}
