-- The barrier's half in Redis: are the marked batches still here?
-- KEYS stream, register, gate. ARGV epoch, nonce, write ("1"), then per mark lane, claim, claim's nonce, number
local gate = KEYS[3]
local epoch = ARGV[1]

local g, err = read('HMGET', gate, 'owner')
if err then return err end
local no = assess(g[1], epoch, ARGV[2])
if no then return no end
for i = 4, #ARGV, 4 do
  local v = redis.call('HGET', gate, 'l:' .. ARGV[i])
  if not v then return {'GAP'} end
  local claim, nonce, last = lane_of(v)
  local theirs = tonumber(ARGV[i + 1])
  if claim > theirs or (claim == theirs and nonce ~= ARGV[i + 2]) then return {'FENCED', epoch} end
  if claim < theirs or last < tonumber(ARGV[i + 3]) then return {'GAP'} end
end
-- WAIT and WAITAOF wait for their connection's last write, so there has to be one.
if ARGV[3] == '1' then redis.call('HSET', gate, 'confirmed', epoch) end
return {'OK'}
