-- nonce, job, epoch, result, effects
if remembered(ARGV[2]) then
  return {'ok'}
end
local gone = lost(ARGV[3], ARGV[4])
if gone then
  return gone
end
local effects = cjson.decode(ARGV[6])
if any_busy(effects) then
  return {'busy'}
end
finish(ARGV[3], 'succeeded', ARGV[5], nil)
apply(effects)
remember(ARGV[2], 'ok')
return {'ok'}
