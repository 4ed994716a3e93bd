-- Reads new entries: at most count, and only until there are as many bytes. The answer has at least one entry, if there
-- is any. In ordered mode only the holder of the stream's lease gets entries, however late the script is carried out.
-- KEYS streams, then in ordered mode the lease of the only one; ARGV group, consumer, the lease as the caller has it
-- ('' without ordered mode), count, bytes.
-- Returns {{{stream, entries}, …}, full}: full is 1 if a bound has ended the read. In ordered mode without an entry,
-- it returns {{}, 0, id of the group's last entry: later ones are after it}; 'held' without the lease.
local group, consumer, lease, count, bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local streams = #KEYS
if lease ~= '' then
  if redis.call('GET', KEYS[streams]) ~= lease then return 'held' end
  streams = streams - 1
end

-- The streams take turns. XREADGROUP is bounded by entries only, so each call requests one entry of a stream, and later
-- a few, according to the heaviest of the last call.
local MOST = 16
local got, open, heaviest = {}, {}, {}
for i = 1, streams do
  got[i], open[i], heaviest[i] = {KEYS[i], {}}, true, 0
end
local left, full = streams, false
while left > 0 and not full do
  for i = 1, streams do
    full = full or count == 0 or bytes <= heaviest[i]
    if open[i] and not full then
      local n = heaviest[i] == 0 and 1 or math.min(count, MOST, math.floor(bytes / heaviest[i]))
      local r = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', n, 'STREAMS', KEYS[i], '>')
      local new, list = r and r[1][2] or {}, got[i][2]
      heaviest[i] = 1
      for j = 1, #new do
        local fields, size = new[j][2], 0
        for f = 2, #fields, 2 do size = size + #fields[f] end -- the values only
        if size > heaviest[i] then heaviest[i] = size end
        bytes = bytes - size
        list[#list + 1] = new[j]
      end
      count = count - #new
      if #new < n then open[i], left = false, left - 1 end
    end
  end
end
local answer = {}
for i = 1, streams do
  if #got[i][2] > 0 then answer[#answer + 1] = got[i] end
end
if #answer == 0 and lease ~= '' then
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local g = {}
    for i = 1, #info, 2 do g[info[i]] = info[i + 1] end
    if g['name'] == group then return {{}, 0, g['last-delivered-id']} end
  end
  return redis.error_reply('NOGROUP no such group')
end
return {answer, full and 1 or 0}
