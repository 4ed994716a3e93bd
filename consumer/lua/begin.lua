-- Notes that an attempt begins, so that a crash in it counts.
-- KEYS[1] stream; ARGV group, consumer, id, number of the attempt. Returns 0 if another consumer has the entry now, or
-- has finished it; 2 if the group is behind, and it is still to be delivered.
local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
local exists = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
if p and p[2] ~= ARGV[2] then return 0 end
if exists and not p then
  local last = delivered(KEYS[1], ARGV[1])
  if last and not redis.call('XRANGE', KEYS[1], ARGV[3], last, 'COUNT', 1)[1] then return 2 end
  return 0
end
if exists then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
end
return 1
