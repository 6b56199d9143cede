-- job
if redis.call('EXISTS', key('job', ARGV[2])) == 0 then
  return {'unknown'}
end
if is_unfinished(ARGV[2]) then
  cancel(ARGV[2], CANCELLED)
end
return {'ok'}
