-- Adds to the doubt what an adoption has found in the stream, and the gate does not know. From then on it knows the stream's last
-- entry.
-- KEYS stream, gate. ARGV source, epoch, nonce, the stream's last entry ('' for none), ids (16 bytes each)
local gate = KEYS[2]

local g, err = read(gate, 'source', 'owner', 'doubt', 'last')
if err then return err end
local no = assess(g[1], g[2], ARGV[1], ARGV[2], ARGV[3])
if no then return no end

local doubt = {}
for at = 1, #ARGV[5], 16 do
  doubt[#doubt + 1] = 'd:' .. string.sub(ARGV[5], at, at + 15)
  doubt[#doubt + 1] = 'a'
end
-- The count first: what is in doubt and not counted would be published.
local known = tonumber(g[3] or '0')
if #doubt > 0 then
  redis.call('HSET', gate, 'doubt', int(known + #doubt / 2))
  set_doubt(gate, known + hset(gate, doubt))
end
if ARGV[4] ~= '' and (not g[4] or forgot(g[4], 1, ARGV[4])) then redis.call('HSET', gate, 'last', ARGV[4]) end
return {'OK'}
