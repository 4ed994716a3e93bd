-- Reads pending entries with their delivery counts, without raising the counts: entries that merely waited in a process
-- that died must not look as if they had been tried. It reads at most count, and only until there are as many bytes,
-- but at least one.
-- KEYS[1] stream, in ordered mode KEYS[2] lease; ARGV group, consumer, 'own' or the least idle time in ms, cursor,
-- count, the lease as the caller has it, bytes.
-- Returns {next cursor ('' at the end), {{id, {field, value, …}, deliveries}, …}, {ids of trimmed entries}}; 'held'
-- without the lease.
if KEYS[2] and redis.call('GET', KEYS[2]) ~= ARGV[6] then return 'held' end
local k, g, c, cursor, count, bytes = KEYS[1], ARGV[1], ARGV[2], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7])
local out, gone = {}, {}

-- add reads one entry. An entry of this consumer's own gets a sign of life.
local function add(id, own)
  local e = redis.call('XRANGE', k, id, id)[1]
  if not e then
    redis.call('XACK', k, g, id)
    gone[#gone + 1] = id
    return
  end
  local p = redis.call('XPENDING', k, g, id, id, 1)[1]
  if own then redis.call('XCLAIM', k, g, c, 0, id, 'JUSTID') end
  out[#out + 1] = {id, e[2], p and p[4] or 1}
  for _, s in ipairs(e[2]) do bytes = bytes - #s end
end

if ARGV[3] == 'own' then
  local page = redis.call('XPENDING', k, g, cursor, '+', count, c)
  cursor = #page == count and '(' .. page[count][1] or ''
  for i, p in ipairs(page) do
    add(p[1], true)
    if bytes <= 0 and i < #page then
      cursor = '(' .. p[1]
      break
    end
  end
  return {cursor, out, gone}
end

-- One at a time: entries that are claimed and not returned would not be found again.
for _ = 1, count do
  local r = redis.call('XAUTOCLAIM', k, g, c, ARGV[3], cursor, 'COUNT', 1, 'JUSTID')
  for _, id in ipairs(r[3] or {}) do gone[#gone + 1] = id end
  for _, id in ipairs(r[2]) do add(id) end
  cursor = r[1]
  if cursor == '0-0' then return {'', out, gone} end
  if bytes <= 0 then break end
end
return {cursor, out, gone}
