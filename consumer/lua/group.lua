-- Creates the group if it is missing. A new one begins at the first entry; entries that were trimmed before count as
-- read, so that lag and loss are exact from the start.
-- KEYS[1] stream; ARGV group. Returns 1 if it was created.
local first = 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  for i, g in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if g[2] == ARGV[1] then return 0 end
  end
  local info, s = redis.call('XINFO', 'STREAM', KEYS[1]), {}
  for i = 1, #info, 2 do s[info[i]] = info[i + 1] end
  first = math.max(0, (s['entries-added'] or 0) - s['length'])
end
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM', 'ENTRIESREAD', first)
return 1
