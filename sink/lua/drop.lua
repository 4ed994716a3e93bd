-- Deletes a stream on purpose, once every registered database has dropped it: the relay of any other would restore its
-- events.
-- KEYS stream, register. ARGV source, for how many ms the drop of another database counts
-- Answers {OK}, or {WAITING, name…} with the databases that have not dropped it.
local base, source, within = KEYS[2], ARGV[1], tonumber(ARGV[2])
local r, err = register_of(base)
if err then return err end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local waiting, noted = {'WAITING'}, {'drop:' .. source}
for name, other in pairs(r.names) do
  local at = tonumber(r['drop:' .. other] or '0')
  noted[#noted + 1] = 'drop:' .. other
  if other ~= source and now - at > within then waiting[#waiting + 1] = name end
end
if #waiting > 1 then
  redis.call('HSET', base, 'drop:' .. source, int(now))
  return waiting
end
hdel(base, noted)
redis.call('UNLINK', KEYS[1])
return {'OK'}
