-- Creates the groups that the stream lacks. Each begins at the first entry; entries that were trimmed before count as
-- read, so that lag and loss are exact from the start.
-- KEYS stream. ARGV groups, which may be there twice. Answers how many were made.
local stream, there, first, made = KEYS[1], {}, 0, 0
if redis.call('EXISTS', stream) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do there[fields(group)['name']] = true end
  local s = fields(redis.call('XINFO', 'STREAM', stream))
  first = math.max(0, (s['entries-added'] or 0) - s['length'])
end
for _, group in ipairs(ARGV) do
  if not there[group] then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM', 'ENTRIESREAD', first)
    there[group], made = true, made + 1
  end
end
return made
