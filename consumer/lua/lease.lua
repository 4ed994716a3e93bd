-- Takes, renews or gives up the right to read a stream for a group.
--
-- The lease is consumer|process|turn. A consumer takes a new turn after each failure of its connection. Requests of an
-- earlier turn, or of another consumer, that Redis executes late are refused (read.lua, take.lua).
-- KEYS[1] lease; ARGV consumer, a number that is the process's own, turn, time to live in ms (0 gives it up).
-- Returns 'renewed' (this process had it), 'taken', 'released' or 'held' (by another consumer, or in a later turn).
local held, lease, own = redis.call('GET', KEYS[1]), ARGV[1] .. '|' .. ARGV[2] .. '|' .. ARGV[3], false
if held then
  local name, process, turn = string.match(held, '^(.*)|(%x+)|(%d+)$')
  if (name or held) ~= ARGV[1] then return 'held' end
  own = process == ARGV[2]
  if own and tonumber(turn) > tonumber(ARGV[3]) then return 'held' end
end
if ARGV[4] == '0' then
  redis.call('DEL', KEYS[1])
  return 'released'
end
if held == lease then
  redis.call('PEXPIRE', KEYS[1], ARGV[4]) -- which a full server does not refuse
else
  redis.call('SET', KEYS[1], lease, 'PX', ARGV[4])
end
return own and 'renewed' or 'taken'
