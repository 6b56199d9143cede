-- site, kinds. Whether a job may be claimed now, the seconds until one may be without being put, and where the streams
-- stand: what is put behind that wakes whoever reads on from there.
wake_rested()
local kinds, ends, found = cjson.decode(ARGV[3]), {}, 0
for _, kind in ipairs(kinds) do
  local stream, last = key('queue', kind), '0-0'
  if redis.call('EXISTS', stream) == 1 then
    local info = redis.call('XINFO', 'STREAM', stream)
    for number = 1, #info, 2 do
      if info[number] == 'last-generated-id' then
        last = info[number + 1]
      end
    end
  end
  ends[#ends + 1] = last
  for _, tenant in ipairs(redis.call('ZRANGE', key('tenants', kind), 0, -1)) do
    if found == 0 and head(kind .. ':' .. tenant, ARGV[2]) then
      found = 1
    end
  end
end
local rested = redis.call('ZRANGE', key('resting'), 0, 0, 'WITHSCORES')
local pause = rested[2] and math.max(0, tonumber(rested[2]) - now) or -1
return {found, stamp(pause), ends}
