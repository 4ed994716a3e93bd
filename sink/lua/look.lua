-- What an adoption wants to know of a stream before it is published to again.
-- KEYS stream, gate. Answers {1 if there is a gate, events it has let through, last id of the stream ('' without one), now in
-- ms}.
local gate = redis.call('TYPE', KEYS[2]).ok == 'hash'
local n = gate and tonumber(redis.call('HGET', KEYS[2], 'n')) or 0
local last, t = '', redis.call('TIME')
if redis.call('TYPE', KEYS[1]).ok == 'stream' then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
end
return {gate and 1 or 0, n, last, t[1] * 1000 + math.floor(t[2] / 1000)}
