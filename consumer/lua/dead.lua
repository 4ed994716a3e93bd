-- Moves an entry to the dead stream and acknowledges it. Safe to repeat after a lost reply.
-- KEYS[1] stream, KEYS[2] dead stream; ARGV group, consumer, id, then the fields of the dead entry.
-- Returns 'moved', 'already' (acknowledged, or moved by an earlier call), or 'lost' (another consumer owns it now).
local unpack = table.unpack or unpack -- its name in Lua 5.4 and in 5.1
local k, g, id = KEYS[1], ARGV[1], ARGV[3]
local p = redis.pcall('XPENDING', k, g, id, id, 1)
if p.err and not string.find(p.err, 'NOGROUP', 1, true) then return p end
local owner = (not p.err) and p[1] and p[1][2]
if owner and owner ~= ARGV[2] then return 'lost' end
if not owner then
  -- Acknowledged, or moved by this consumer: then the entry still exists, or is in the dead stream. Otherwise it was
  -- trimmed or flushed, and the caller's copy is the last one.
  if redis.call('XRANGE', k, id, id)[1] then return 'already' end
  local before = '+'
  for _ = 1, 100 do -- one at a time, because payloads may be large
    local e = redis.call('XREVRANGE', KEYS[2], before, '-', 'COUNT', 1)[1]
    if not e then break end
    local f = {}
    for i = 1, #e[2], 2 do f[e[2][i]] = e[2][i + 1] end
    if f.dead_entry == id and f.dead_group == g then return 'already' end
    before = '(' .. e[1]
  end
end
local add = {'XADD', KEYS[2], '*'}
for i = 4, #ARGV do add[#add + 1] = ARGV[i] end
redis.call(unpack(add))
if owner then redis.call('XACK', k, g, id) end
return 'moved'
