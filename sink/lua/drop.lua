-- Deletes a stream on purpose. One that is shared waits until every database has said so: its relay would restore what is its own.
-- KEYS stream, the gate of one that is not shared. ARGV source, for how many ms the word of another database counts
-- Answers {OK} or {WAITING, name…}: those who have not said so.
local base, source = KEYS[2], ARGV[1]
local id, names
if redis.call('TYPE', base).ok == 'hash' then id, names = register_of(base) end
if id then
  local t = redis.call('TIME')
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  redis.call('HSET', base, 'drop:' .. source, int(now))
  local waiting, said = {'WAITING'}, {'drop:' .. source}
  for name, other in pairs(names) do
    local at = tonumber(redis.call('HGET', base, 'drop:' .. other) or '0')
    said[#said + 1] = 'drop:' .. other
    if now - at > tonumber(ARGV[2]) then waiting[#waiting + 1] = name end
  end
  if #waiting > 1 then return waiting end
  hdel(base, said)
end
redis.call('UNLINK', KEYS[1])
return {'OK'}
