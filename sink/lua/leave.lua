-- Takes a database out of the register of a stream. If it publishes there again, its relay registers again, and
-- compares the stream with its log first: its gate is gone.
-- KEYS register, and the gate that an answer {KEYS, gate} demands. ARGV the source field of the database's entries
-- Answers {OK}, or {GONE} if it is not registered.
local base, name = KEYS[1], ARGV[1]
local r, err = register_of(base)
if err then return err end
local source = r.names[name]
if not source then return {'GONE'} end
local ask = undeclared({base .. ':' .. source})
if ask then return ask end
redis.call('DEL', base .. ':' .. source)
redis.call('HDEL', base, 's:' .. name, 'drop:' .. source, 'alone')
return {'OK'}
