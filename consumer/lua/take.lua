-- Reads pending entries with their delivery counts, without raising the counts: entries that merely waited in a process
-- that died must not look as if they had been tried.
-- KEYS[1] stream, in ordered mode KEYS[2] lease; ARGV group, consumer, 'own' or the least idle time in ms, cursor,
-- count, the lease as the caller has it.
-- Returns {next cursor ('' at the end), {{id, deliveries, {field, value, …}}, …}, {ids whose entries were
-- trimmed}}; 'held' without the lease.
if KEYS[2] and redis.call('GET', KEYS[2]) ~= ARGV[6] then return 'held' end
local k, g, c, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[5])
local cursor, ids, gone = '', {}, {}
if ARGV[3] == 'own' then
  for i, p in ipairs(redis.call('XPENDING', k, g, ARGV[4], '+', count, c)) do ids[i] = p[1] end
  if #ids == count then cursor = '(' .. ids[#ids] end
else
  local r = redis.call('XAUTOCLAIM', k, g, c, ARGV[3], ARGV[4], 'COUNT', count, 'JUSTID')
  ids, gone = r[2], r[3] or {}
  if r[1] ~= '0-0' then cursor = r[1] end
end
local out, mine = {}, {}
for _, id in ipairs(ids) do
  local e = redis.call('XRANGE', k, id, id)[1]
  if e then
    local p = redis.call('XPENDING', k, g, id, id, 1)[1]
    out[#out + 1] = {id, p and p[4] or 1, e[2]}
    mine[#mine + 1] = id
  else
    redis.call('XACK', k, g, id)
    gone[#gone + 1] = id
  end
end
if ARGV[3] == 'own' and #mine > 0 then
  mine[#mine + 1] = 'JUSTID'
  redis.call('XCLAIM', k, g, c, 0, unpack(mine))
end
return {cursor, out, gone}
