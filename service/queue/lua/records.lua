-- Files, documents and prefills: hashes of JSON fields, and the sets that find them. What follows from what is the
-- same as in service.documents.records.
local ONCE = {
  files = {tenant = true, created_at = true},
  documents = {tenant = true, folder = true, created_at = true, stage_seconds = true},
  prefills = {tenant = true, document_id = true, fidelity = true},
}
local OWNER = {files = 'tenant', documents = 'tenant', prefills = 'document_id'}
local DEFAULTS = {
  files = {kind = '"auto"', fidelity = '"default"', priority = '0', pinned = 'false', sources = '[]', status = '"uploaded"'},
  documents = {stage_seconds = '{}'},
  prefills = {state = '"queued"'},
}

local function record_key(table_name, id)
  return key(table_name, id)
end

local function field(table_name, id, name)
  return decoded(redis.call('HGET', record_key(table_name, id), name))
end

local function set_fields(k, fields)
  for name, value in pairs(fields) do
    redis.call('HSET', k, name, value)
  end
end

local function message_of(failure)
  local error_value = decoded(failure)
  return encoded(error_value and error_value.message or nil)
end

-- Waiting handles of a finished prefill become processed or error; those states are final.
local function derive(prefill_id)
  local row = redis.call('HMGET', record_key('prefills', prefill_id), 'document_id', 'fidelity', 'state', 'error')
  local document_id, fidelity, state = decoded(row[1]), row[2], decoded(row[3])
  local change
  if state == 'ready' then
    change = {status = '"processed"', status_details = 'null', error = 'null'}
  elseif state == 'error' or state == 'cancelled' then
    change = {status = '"error"', status_details = message_of(row[4]), error = row[4] or 'null'}
  end
  if not document_id or not change then
    return
  end
  for _, file_id in ipairs(redis.call('SMEMBERS', key('handles', document_id))) do
    local k = record_key('files', file_id)
    local file = redis.call('HMGET', k, 'fidelity', 'status')
    if file[1] == fidelity and file[2] == '"uploaded"' then
      set_fields(k, change)
    end
  end
end

-- A job came into a state: its prefill follows, and so do the files that its ingest was for. `failure` is JSON.
local function follow(job_id, state, failure)
  if state == 'succeeded' then
    return
  end
  local prefill_state = (state == 'failed' or state == 'dead') and 'error' or state
  local prefill_id = redis.call('HGET', key('job', job_id), 'prefill')
  if prefill_id and field('prefills', prefill_id, 'job_id') == job_id then
    set_fields(record_key('prefills', prefill_id), {state = encoded(prefill_state), error = failure or 'null'})
    derive(prefill_id)
  end
  if prefill_state ~= 'error' and prefill_state ~= 'cancelled' then
    return
  end
  for _, file_id in ipairs(redis.call('SMEMBERS', key('ingest_files', job_id))) do
    local k = record_key('files', file_id)
    local file = redis.call('HMGET', k, 'status', 'document_id')
    if file[1] == '"uploaded"' and not decoded(file[2]) then
      set_fields(k, {status = '"error"', status_details = message_of(failure), error = failure or 'null'})
    end
  end
end

-- Handles whose ingest or prefill ended in this job's failure wait again.
local function reopen_files(job_id)
  local files = redis.call('SMEMBERS', key('ingest_files', job_id))
  local again = {}
  for _, file_id in ipairs(files) do
    if not field('files', file_id, 'document_id') then
      again[#again + 1] = file_id
    end
  end
  local prefill_id = redis.call('HGET', key('job', job_id), 'prefill')
  if prefill_id and field('prefills', prefill_id, 'job_id') == job_id then
    local row = redis.call('HMGET', record_key('prefills', prefill_id), 'document_id', 'fidelity')
    for _, file_id in ipairs(redis.call('SMEMBERS', key('handles', decoded(row[1])))) do
      if redis.call('HGET', record_key('files', file_id), 'fidelity') == row[2] then
        again[#again + 1] = file_id
      end
    end
  end
  for _, file_id in ipairs(again) do
    if field('files', file_id, 'status') == 'error' then
      set_fields(record_key('files', file_id), {status = '"uploaded"', status_details = 'null', error = 'null'})
    end
  end
end

local function move_member(name, old, new, member)
  if old ~= new then
    if old then
      redis.call('SREM', key(name, old), member)
    end
    if new then
      redis.call('SADD', key(name, new), member)
    end
  end
end

local INDEXED = {'document_id', 'ingest_job', 'expires_at', 'size_bytes', 'tenant', 'created_at'}

local function file_index(id)
  local row = redis.call('HMGET', record_key('files', id), unpack(INDEXED))
  local found = {}
  for number, name in ipairs(INDEXED) do
    found[name] = decoded(row[number])
  end
  return found
end

local function reindex_file(id, before, after)
  move_member('handles', before.document_id, after.document_id, id)
  move_member('ingest_files', before.ingest_job, after.ingest_job, id)
  if after.expires_at then
    redis.call('ZADD', key('file_expiry'), stamp(after.expires_at), id)
  elseif before.expires_at then
    redis.call('ZREM', key('file_expiry'), id)
  end
  local tenant, grown = after.tenant or before.tenant, (after.size_bytes or 0) - (before.size_bytes or 0)
  if grown ~= 0 then
    redis.call('INCRBY', key('uploaded_bytes'), string.format('%d', grown))
    redis.call('HINCRBY', key('uploaded_bytes_of'), tenant, string.format('%d', grown))
  end
  if after.tenant and not before.tenant then
    redis.call('ZADD', key('files_of', tenant), stamp(after.created_at), id)
  elseif before.tenant and not after.tenant then
    redis.call('ZREM', key('files_of', tenant), id)
  end
end

-- What bytes a new record would name: nobody may begin to while they are being removed.
local function is_busy(change)
  local name = nil
  if change.table == 'files' then
    name = key('removing', 'upload', change.id)
  elseif change.table == 'documents' and change.fields.folder then
    name = key('removing', 'folder', decoded(change.fields.folder))
  elseif change.table == 'prefills' then
    name = key('removing', 'holder', change.id)
  end
  return name and redis.call('EXISTS', name) == 1
end

-- Returns the prefill whose handles are to be looked at. A change that doesn't name the row's owner is for a row that
-- exists: where it was deleted meanwhile, the change has nothing left to say.
local function apply_change(change)
  local name, id, fields = change.table, change.id, change.fields
  local k = record_key(name, id)
  local exists = redis.call('EXISTS', k) == 1
  if not exists and not fields[OWNER[name]] then
    return nil
  end
  local before = name == 'files' and file_index(id)
  if not exists then
    set_fields(k, DEFAULTS[name])
  end
  for column, value in pairs(fields) do
    if not (exists and ONCE[name][column]) then
      redis.call('HSET', k, column, value)
    end
  end
  if name == 'files' then
    local after = file_index(id)
    reindex_file(id, before, after)
    return after.document_id and (after.document_id .. ':' .. field('files', id, 'fidelity'))
  elseif name == 'documents' and not exists then
    redis.call('HSET', key('folders'), decoded(fields.folder), id)
  elseif name == 'prefills' then
    if not exists then
      redis.call('SADD', key('prefills_of', decoded(fields.document_id)), id)
    end
    return id
  end
  return nil
end
