-- nonce, worker, lease in seconds, site, kinds, tokens that the job must cost less than or nothing, tenants left out
local known = remembered(ARGV[2])
if known then
  return redis.call('HGETALL', key('job', known))
end
wake_rested()
local kinds, below, without = cjson.decode(ARGV[6]), tonumber(ARGV[7]), cjson.decode(ARGV[8])
local waiting = heads(kinds, ARGV[5], below, without)
if #waiting == 0 then
  return {}
end
local id = choose(table.concat(kinds, ',') .. (below and '<' or '') .. (next(without) and '-' or ''), waiting)
start(id, ARGV[3], tonumber(ARGV[4]), ARGV[5])
remember(ARGV[2], id)
return redis.call('HGETALL', key('job', id))
