-- nonce, worker, lease in seconds, site, kinds, tokens that the job must cost less than or nothing
local known = remembered(ARGV[2])
if known then
  return redis.call('HGETALL', key('job', known))
end
wake_rested()
local kinds, below = cjson.decode(ARGV[6]), tonumber(ARGV[7])
local waiting = heads(kinds, ARGV[5], below)
if #waiting == 0 then
  return {}
end
local id = choose(table.concat(kinds, ',') .. (below and '<' or ''), waiting)
start(id, ARGV[3], tonumber(ARGV[4]), ARGV[5])
remember(ARGV[2], id)
return redis.call('HGETALL', key('job', id))
