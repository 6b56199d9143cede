-- holder, documents: KV over these documents is kept for `holder`. The first document that is gone, if one is.
local documents = cjson.decode(ARGV[3])
for _, document_id in ipairs(documents) do
  if redis.call('EXISTS', record_key('documents', document_id)) == 0 then
    return {'unknown', document_id}
  end
end
if redis.call('EXISTS', key('removing', 'holder', ARGV[2])) == 1 then
  return {'busy'}
end
for _, document_id in ipairs(documents) do
  redis.call('SADD', key('shared', ARGV[2]), document_id)
  redis.call('SADD', key('shared_of', document_id), ARGV[2])
end
return {'ok'}
