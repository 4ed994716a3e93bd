-- Takes, renews or gives up the right to read a stream for a group.
-- KEYS[1] lease; ARGV consumer, time to live in ms (0 gives it up).
-- Returns 'renewed', 'taken', 'released' or 'held' (by another consumer).
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 'held' end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return 'released'
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return owner and 'renewed' or 'taken'
