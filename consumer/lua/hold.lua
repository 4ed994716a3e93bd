-- A sign of life for entries in work: resets their idle time, unless another consumer has taken them over. Entries that
-- the group, which is behind, is still to deliver are left as they are.
-- KEYS[1] stream; ARGV group, consumer, idle time to set in ms, delivery count to set or -1, ids. Returns the ids that
-- another consumer has now, or has finished.
local unpack = table.unpack or unpack -- its name in Lua 5.4 and in 5.1
local k, g, c = KEYS[1], ARGV[1], ARGV[2]
local lost, mine, last = {}, {}, nil
for i = 5, #ARGV do
  local p = redis.call('XPENDING', k, g, ARGV[i], ARGV[i], 1)[1]
  if p and p[2] ~= c then
    lost[#lost + 1] = ARGV[i]
  elseif redis.call('XRANGE', k, ARGV[i], ARGV[i])[1] then
    -- (XCLAIM would drop a trimmed entry, which this consumer still has in memory and will acknowledge.)
    if p then
      mine[#mine + 1] = ARGV[i]
    else
      last = last or delivered(k, g)
      if redis.call('XRANGE', k, ARGV[i], last, 'COUNT', 1)[1] then lost[#lost + 1] = ARGV[i] end
    end
  end
end
if #mine > 0 then
  for _, a in ipairs({'IDLE', ARGV[3], 'JUSTID'}) do mine[#mine + 1] = a end
  if ARGV[4] ~= '-1' then
    mine[#mine + 1] = 'RETRYCOUNT'
    mine[#mine + 1] = ARGV[4]
  end
  redis.call('XCLAIM', k, g, c, 0, unpack(mine))
end
return lost
