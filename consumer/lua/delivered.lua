-- delivered returns the id up to which a group has read a stream.
local function delivered(stream, group)
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local of = {}
    for i = 1, #info, 2 do of[info[i]] = info[i + 1] end
    if of['name'] == group then return of['last-delivered-id'] end
  end
end
