-- Empties the doubt that adoptions made. Events that a later claim of a part inherited from an earlier one stay: they
-- are newer than the adoption, and their rows may still be unsettled.
-- KEYS stream, register, gate. ARGV epoch, nonce
local gate = KEYS[3]

local g, err = read('HMGET', gate, 'owner', 'doubt')
if err then return err end
local no = assess(g[1], ARGV[1], ARGV[2])
if no then return no end
local doubt = tonumber(g[2] or '0')
if doubt == 0 then return {'OK'} end

local all, drop = redis.call('HGETALL', gate), {}
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 2) == 'd:' and string.sub(all[i + 1], 1, 1) == 'a' then drop[#drop + 1] = all[i] end
end
if #drop > 0 then set_doubt(gate, doubt - hdel(gate, drop)) end
return {'OK'}
