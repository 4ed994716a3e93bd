-- Reads new entries for the holder of the stream's lease, and for nobody else, however late it is carried out.
-- KEYS[1] stream, KEYS[2] lease; ARGV group, consumer, the lease as the caller has it, count.
-- Returns {entries} or, if there is none, {{}, id of the group's last entry: what comes is behind it}; 'held' without
-- the lease.
if redis.call('GET', KEYS[2]) ~= ARGV[3] then return 'held' end
local r = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[4], 'STREAMS', KEYS[1], '>')
if r then return {r[1][2]} end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local g = {}
  for i = 1, #info, 2 do g[info[i]] = info[i + 1] end
  if g['name'] == ARGV[1] then return {{}, g['last-delivered-id']} end
end
return redis.error_reply('NOGROUP no such group')
