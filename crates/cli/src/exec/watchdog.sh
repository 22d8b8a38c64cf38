# Ends the programs of a worker that was killed.
#
# The worker holds the only write end of our standard input, so `read` fails when it is gone, however it went. Until
# then it tells us by lines which process groups there are:
#   + GROUP      started
#   - GROUP      ended
trap '' INT TERM HUP
groups=' '
while read -r sign group; do
    case $sign in
        +) groups="$groups$group " ;;
        -)
            case $groups in
                *" $group "*) groups="${groups%% "$group" *} ${groups#* "$group" }" ;;
            esac
            ;;
    esac
done
for group in $groups; do
    kill -TERM "-$group" 2>/dev/null
done
[ "$groups" = ' ' ] || sleep 2
for group in $groups; do
    kill -KILL "-$group" 2>/dev/null
done
