-- Adds events to the doubt that an adoption has found in the stream and that the gate does not know. Afterwards the
-- gate knows the stream's last entry.
-- KEYS stream, register, gate. ARGV epoch, nonce, the stream's last entry ('' for none), ids (16 bytes each)
local gate = KEYS[3]

local g, err = read('HMGET', gate, 'owner', 'doubt', 'last')
if err then return err end
local no = assess(g[1], ARGV[1], ARGV[2])
if no then return no end

local doubt = {}
for at = 1, #ARGV[4], 16 do
  doubt[#doubt + 1] = 'd:' .. string.sub(ARGV[4], at, at + 15)
  doubt[#doubt + 1] = 'a'
end
-- The count comes first: events in doubt beyond the count would be published.
local known = tonumber(g[2] or '0')
if #doubt > 0 then
  redis.call('HSET', gate, 'doubt', int(known + #doubt / 2))
  set_doubt(gate, known + hset(gate, doubt))
end
if lacks(g[3] or '', ARGV[3]) then redis.call('HSET', gate, 'last', ARGV[3]) end
return {'OK'}
