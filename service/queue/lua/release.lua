-- nonce, job, epoch
if remembered(ARGV[2]) then
  return {'ok'}
end
local gone = lost(ARGV[3], ARGV[4])
if gone then
  return gone
end
requeue(ARGV[3], nil, tonumber(job_field(ARGV[3], 'attempts')) - 1, nil)
remember(ARGV[2], 'ok')
return {'ok'}
