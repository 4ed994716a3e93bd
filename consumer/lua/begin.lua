-- Notes that an attempt begins, so that a crash in it counts.
-- KEYS[1] stream; ARGV group, consumer, id, number of the attempt. Returns 0 if another consumer owns the entry now.
local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not p then return 1 end
if p[2] ~= ARGV[2] then return 0 end
if redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1] then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
end
return 1
