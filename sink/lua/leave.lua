-- Takes a database out of the register of a shared stream. If it publishes there again its relay registers anew, and compares
-- the stream with its log first: its gate is gone.
-- KEYS the gate of a stream that is not shared. ARGV the source field of the database's entries
-- Answers {OK}, or {GONE} if it is not registered.
local _, names = register_of(KEYS[1])
local source = names and names[ARGV[1]]
if not source then return {'GONE'} end
redis.call('DEL', KEYS[1] .. ':' .. source)
redis.call('HDEL', KEYS[1], 's:' .. ARGV[1], 'drop:' .. source)
return {'OK'}
