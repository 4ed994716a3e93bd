-- Notes how far a replay is, unless it was begun again meanwhile.
-- KEYS note. ARGV run, ms to live, then fields and values
-- Answers {OK} or {GONE}.
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return {'GONE'} end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'OK'}
