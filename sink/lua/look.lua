-- What an adoption wants to know of a stream before it is published to again.
-- KEYS stream, gate. Answers {1 if there is a gate, events it has let through, now in ms, the id of the last of them that is in
-- the stream ('' if none is known to be), 1 if the stream has forgotten some}. A replay adds to the stream past the gate: the
-- stream's own last id may be younger than what is lost.
local gate = redis.call('TYPE', KEYS[2]).ok == 'hash'
local g = gate and redis.call('HMGET', KEYS[2], 'n', 'last') or {}
local n, last, t = tonumber(g[1] or '0'), last_id_of(KEYS[1]), redis.call('TIME')
local gone = forgot(last, n, g[2])
if not gone and g[2] then last = g[2] end
return {gate and 1 or 0, n, t[1] * 1000 + math.floor(t[2] / 1000), last, gone and 1 or 0}
