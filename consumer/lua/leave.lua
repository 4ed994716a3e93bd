-- Removes a consumer unless entries are pending: removing it would drop them, so it stays until another consumer has
-- claimed them. KEYS[1] stream; ARGV group, consumer. Returns 1 if it was removed.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
