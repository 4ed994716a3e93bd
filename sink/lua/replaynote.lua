-- Notes how far a replay is, unless it was begun again meanwhile.
-- KEYS note. ARGV run, ms to live, then fields and values
-- Answers {OK} or {GONE}.
local unpack = table.unpack or unpack -- its name in Lua 5.4 and in 5.1
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return {'GONE'} end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'OK'}
