-- Takes an entry out of a dead stream and gives it back to its group.
-- KEYS[1] stream, KEYS[2] dead stream; ARGV dead entry's id, group, original entry's id.
-- Returns 'gone' (no such dead entry), 'pending' (delivered again to the group alone) or 'added' (the original entry was
-- trimmed, so the event was added to the stream again, marked as replayed and for this group).
local d = redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not d then return 'gone' end
-- An error here says that the group is gone. Pending already: somebody has it.
local pending = redis.call('XPENDING', KEYS[1], ARGV[2], ARGV[3], ARGV[3], 1)[1]
if pending then
  redis.call('XDEL', KEYS[2], ARGV[1])
  return 'pending'
end
if redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1] then
  -- Idle for a day: whoever looks next may claim it.
  redis.call('XCLAIM', KEYS[1], ARGV[2], 'retry', 0, ARGV[3], 'IDLE', 86400000, 'RETRYCOUNT', 0, 'FORCE', 'JUSTID')
  redis.call('XDEL', KEYS[2], ARGV[1])
  return 'pending'
end
local add = {'XADD', KEYS[1], '*', 'replayed', '1', 'for_group', ARGV[2]}
for i = 1, #d[2], 2 do
  local f = d[2][i]
  if string.sub(f, 1, 5) ~= 'dead_' and f ~= 'replayed' and f ~= 'for_group' then
    add[#add + 1] = f
    add[#add + 1] = d[2][i + 1]
  end
end
redis.call(unpack(add))
redis.call('XDEL', KEYS[2], ARGV[1])
return 'added'
