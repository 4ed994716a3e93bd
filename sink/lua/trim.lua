-- Shortens the stream to about maxlen, never past what a group has not acknowledged unless forced.
-- KEYS stream. ARGV maxlen, force ("1"). Answers how many entries went.
local stream, maxlen = KEYS[1], tonumber(ARGV[1])

-- XLEN of a missing key is 0; of another type it is an error, which is the answer.
local surplus = redis.call('XLEN', stream) - maxlen
if surplus <= 0 then return 0 end
-- Without a LIMIT a call stops after 100 nodes. With one it removes whole nodes while they fit into it, so at most the
-- surplus goes. 100,000 entries take about 6 ms, in which Redis does nothing else; the rest goes with the next calls.
local limit = string.format('%.0f', math.min(surplus, 100000))

local floor
if ARGV[2] ~= '1' then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local f = fields(group)
    local bound = f['last-delivered-id']
    if f['pending'] > 0 then
      local oldest = redis.call('XPENDING', stream, f['name'])[2]
      if oldest and less(oldest, bound) then bound = oldest end
    end
    if not floor or less(bound, floor) then floor = bound end
  end
end
if floor then return redis.call('XTRIM', stream, 'MINID', '~', floor, 'LIMIT', limit) end
return redis.call('XTRIM', stream, 'MAXLEN', '~', ARGV[1], 'LIMIT', limit)
